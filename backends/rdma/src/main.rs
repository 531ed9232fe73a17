//! The RDMA backend.

fn main() {}
