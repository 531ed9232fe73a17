//! Device memory for measurements, as `farlane-io calibrate` and `cargo xtask bench gpu-ssd` use
//! it; and the tool's command line.

pub mod memory;
pub mod options;
