//! See `farlane_fuzz_targets::targets::broker`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::broker::run(data));
