//! See `farlane_fuzz_targets::targets::lending`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::lending::run(data));
