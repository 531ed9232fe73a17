//! The program farlane-io.
