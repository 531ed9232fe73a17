//! Drives a software GPU from user space.
