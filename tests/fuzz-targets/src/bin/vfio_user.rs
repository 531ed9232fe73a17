//! See `farlane_fuzz_targets::targets::vfio_user`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::vfio_user::run(data));
