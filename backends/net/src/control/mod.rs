//! The control queue (virtio 1.2, 5.1.6.5).
