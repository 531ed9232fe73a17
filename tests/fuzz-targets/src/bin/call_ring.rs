//! See `farlane_fuzz_targets::targets::call_ring`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::call_ring::run(data));
