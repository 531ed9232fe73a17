//! The C symbols of libfarlane_io.so.
