//! See `farlane_fuzz_targets::targets::work_request`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::work_request::run(data));
