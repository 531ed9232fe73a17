//! `librdmacm.so.1`: connection management, as plain functions over [`farlane_rdma_client`] and
//! `libibverbs.so.1`.
//!
//! * [`sys`]: the C structures of `rdma/rdma_cma.h`; `verbs`: functions of `libibverbs.so.1`;
//! * `address`: addresses of sockets, and GIDs; `device`: the devices that have them;
//! * `channel`, `event`: event channels, and what has happened;
//! * `id`, `resolve`, `connect`, `queue_pair`, `endpoint`, `multicast`: ids, and what is done with
//!   them;
//! * `addrinfo`, `strings`, `errno`: conversions;
//! * `exports`, `unsupported`: the C names of all this, and of what there is not.
//!
//! **Safety.** Every `unsafe` function here takes pointers from a C program. Its contract is that
//! of the manual page of the same name: a pointer is NULL where that page allows it; else it
//! points to an object that this library, or `libibverbs.so.1`, made and that is not destroyed, or
//! to memory that is large enough and that nobody else writes during the call. A program may use
//! several ids from several threads, and one id from one thread besides the one that takes events.
#![allow(
    clippy::missing_safety_doc,
    reason = "one contract for all, stated above and in the manual pages"
)]

mod address;
mod addrinfo;
mod channel;
mod connect;
mod device;
mod endpoint;
mod errno;
mod event;
mod exports;
mod id;
mod multicast;
mod queue_pair;
mod resolve;
mod strings;
pub mod sys;
mod unsupported;
mod verbs;
