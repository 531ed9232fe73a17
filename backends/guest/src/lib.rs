//! The farlane virtio device, as a backend serves it.
