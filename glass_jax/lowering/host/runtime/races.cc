#include "races.h"
namespace glass {
void touch(Space, size_t, size_t, Access) {}
void touch_global(uint32_t, size_t, size_t, Access) {}
void forget_accesses() {}
}  // namespace glass
