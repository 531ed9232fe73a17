//! Device memory for measurements, as `farlane-io calibrate` and `cargo xtask bench gpu-ssd` use
//! it.

pub mod memory;
