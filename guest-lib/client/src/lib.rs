//! RDMA objects for programs, over a link.
