//! RDMA objects for programs, over a transport.
//!
//! The control path ([`Context`], [`Pd`], [`Mr`], [`Channel`], [`Cq`], [`Srq`], [`Qp`],
//! [`Buffer`]) makes remoted calls through the call ring. The data path ([`Qp::send_queue`],
//! [`Qp::recv_queue`], [`Srq::recv_queue`], [`Cq::poll`], [`Cq::arm`]) touches shared memory only,
//! and rings the backend's doorbell when the backend has said that it sleeps.
//!
//! **Threads.** Every object may be used from any thread; each queue has a lock of its own, the
//! call ring has one for the context.
//!
//! **Life.** Objects hold what they need (a queue pair its completion queues and protection
//! domain, a registration its pin), so dropping in any order is right. `destroy` does explicitly
//! what drop does, and reports what the backend says; it may be called once or more.
//!
//! **A dead device.** Calls, posts, polls and waits then fail with `ENODEV` at once;
//! [`Context::next_async_event`] gives one `EVENT_DEVICE_FATAL` and then `ENODEV`. Work that was
//! outstanding never completes: a poller learns it from the error, not from flushed completions,
//! because only the backend knew what was outstanding. Completions that lay in the queue when the
//! device died are delivered first.
//!
//! **Fork.** For a child process the device is gone: everything fails with `ENODEV`, and its
//! parent notices nothing.

mod address_handle;
mod arena;
mod buffer;
mod call;
mod channel;
mod context;
mod cq;
#[cfg(test)]
mod destroy_tests;
mod error;
mod event_binding;
mod events;
mod header;
#[cfg(test)]
mod loopback;
mod mr;
mod mw;
mod pd;
mod qp;
#[cfg(test)]
mod queue_tests;
mod send_list;
mod spin;
mod srq;
#[cfg(test)]
mod srq_tests;
#[cfg(test)]
mod version_tests;
mod wall_clock;
mod work;
mod xrcd;

pub use address_handle::AddressHandle;
pub use buffer::{Buffer, Placement};
pub use channel::Channel;
pub use context::Context;
pub use cq::{Cq, CqInit};
pub use error::Error;
pub use event_binding::EventBinding;
pub use farlane_abi as abi;
pub use farlane_abi::Errno;
pub use farlane_abi::queue::{Completion, SendTail, Sge, TimedCompletion};
pub use farlane_abi::rdma::{
    AllocBuffer, CreateAh, DeviceAttr, DeviceLimits, Gid, PortAttr, QpAttr, SrqAttr, VerbsStubs,
    VerbsVersion,
};
pub use farlane_transport::{Address, DeviceInfo, ShownFile, TransportError, devices};
pub use farlane_transport::{PerProcess, SHARE_VARIABLE, allow_sharing};
pub use mr::{Mr, MrChange};
pub use mw::Mw;
pub use pd::Pd;
pub use qp::{Qp, QpCaps, QpInit};
pub use send_list::SendList;
pub use srq::Srq;
pub use wall_clock::WallClock;
pub use work::{Payload, RecvQueue, RecvRequest, SendQueue, SendRequest};
pub use xrcd::Xrcd;
