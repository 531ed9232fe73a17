//! See `farlane_fuzz_targets::targets::net_control`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::net_control::run(data));
