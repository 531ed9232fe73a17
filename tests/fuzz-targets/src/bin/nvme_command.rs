//! See `farlane_fuzz_targets::targets::nvme_command`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::nvme_command::run(data));
