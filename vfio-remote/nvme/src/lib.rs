//! An NVMe controller.
