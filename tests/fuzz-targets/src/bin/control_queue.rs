//! See `farlane_fuzz_targets::targets::control_queue`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::control_queue::run(data));
