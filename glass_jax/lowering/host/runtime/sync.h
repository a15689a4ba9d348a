// Calls that order pipes and cores.
#pragma once

#include "device.h"

namespace glass {
bool is_cube_core();
}

inline void asc_init() {}
int64_t asc_get_sub_block_id();
int64_t asc_get_sub_block_num();
int64_t asc_get_block_idx();
int64_t asc_get_block_num();

// Flags between two pipes of a core.
void asc_sync_notify(pipe_t from, pipe_t to, event_t id);
void asc_sync_wait(pipe_t from, pipe_t to, event_t id);

// Everything before on this pipe (PIPE_ALL: on every pipe; then the program itself waits) happens before everything
// after.
void asc_sync_pipe(pipe_t pipe);
void asc_sync();

// Mutexes.
void asc_lock(pipe_t pipe, int id, ascMutexExecuteMode mode = ASC_LOCK_BLOCK);
void asc_unlock(pipe_t pipe, int id, ascMutexExecuteMode mode = ASC_LOCK_BLOCK);

// Counters between the cores of a block (intra), its vector cores (subblock), all of its cores (block), all blocks
// (inter).
void asc_sync_intra_arrive(pipe_t pipe, int64_t id);
void asc_sync_intra_wait(pipe_t pipe, int64_t id);
void asc_sync_subblock_arrive(pipe_t pipe, int64_t id);
void asc_sync_subblock_wait(pipe_t pipe, int64_t id);
void asc_sync_block_arrive(pipe_t pipe, int64_t id);
void asc_sync_block_wait(pipe_t pipe, int64_t id);
void asc_sync_inter_arrive(pipe_t pipe, int64_t id);
void asc_sync_inter_wait(pipe_t pipe, int64_t id);
