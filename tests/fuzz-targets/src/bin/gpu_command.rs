//! See `farlane_fuzz_targets::targets::gpu_command`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::gpu_command::run(data));
