//! See `farlane_fuzz_targets::targets::token_page`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::token_page::run(data));
