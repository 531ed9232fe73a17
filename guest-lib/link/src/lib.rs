//! The way from a process to a backend.
