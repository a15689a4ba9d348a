"""The generated Ascend C of a kernel, compiled for this machine and run."""
