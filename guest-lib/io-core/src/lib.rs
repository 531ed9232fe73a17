//! File I/O with device memory.
