//! libibverbs.so.1.
