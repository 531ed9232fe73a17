//! See `farlane_fuzz_targets::targets::connection_manager`.

#![no_main]

libfuzzer_sys::fuzz_target!(
    |data: &[u8]| farlane_fuzz_targets::targets::connection_manager::run(data)
);
