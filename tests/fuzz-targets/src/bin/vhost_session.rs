//! See `farlane_fuzz_targets::targets::vhost_session`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::vhost_session::run(data));
