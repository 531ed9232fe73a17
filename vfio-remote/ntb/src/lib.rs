//! Non-transparent bridges.
