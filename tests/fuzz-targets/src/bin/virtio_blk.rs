//! See `farlane_fuzz_targets::targets::virtio_blk`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| farlane_fuzz_targets::targets::virtio_blk::run(data));
