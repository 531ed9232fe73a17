//! libfarlane.so: buffers, transfers and callbacks.
