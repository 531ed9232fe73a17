//! See `farlane_fuzz_targets::targets::flow_parse`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::flow_parse::run(data));
