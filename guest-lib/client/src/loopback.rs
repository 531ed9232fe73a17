//! A link whose backend is a thread of the test.
