//! `libibverbs.so.1`: the verbs, as plain functions over [`farlane_rdma_client`].
//!
//! * [`sys`], [`layout`]: the C structures, and proof that they are laid out as C has them;
//! * [`object`]: a C structure that a program sees with Rust state behind it;
//! * [`device`], [`context`], [`attributes`], [`tables`], [`memory`], [`channel`],
//!   [`completion`], [`queue_pair`], [`event`], [`open`], [`import`], [`parent_domain`],
//!   [`advise`]: the control path, one module an object;
//! * [`post`], [`post_ex`], [`poll_ex`]: the data path, which programs reach through pointers in
//!   `ibv_context.ops`, queue pairs and completion queues;
//! * [`qp_attr`], [`strings`], [`rates`], [`errno`]: conversions;
//! * `exports`, `private`, `unsupported`: the C names of all this, and of what there is not.
//!
//! **Safety.** Every `unsafe` function here takes pointers from a C program. Its contract is that
//! of the manual page of the same name: a pointer is NULL where that page allows it; else it
//! points to an object that this library made and that is not destroyed, or to memory that is
//! large enough and that nobody else writes during the call. A program may use any object from
//! any thread.
#![allow(
    clippy::missing_safety_doc,
    reason = "one contract for all, stated above and in the manual pages"
)]

pub mod acknowledgements;
pub mod address;
pub mod advise;
pub mod attributes;
pub mod channel;
pub mod completion;
pub mod context;
pub mod device;
mod dm;
pub mod dmabuf;
pub mod errno;
pub mod event;
mod exports;
pub mod import;
pub mod layout;
pub mod memory;
pub mod object;
pub mod open;
pub mod parent_domain;
pub mod poll_ex;
pub mod post;
pub mod post_ex;
mod private;
pub mod queue_pair;
pub mod rates;
pub mod srq;
pub mod strings;
pub mod sysfs;
pub mod tables;
mod unsupported;
pub mod window;
pub mod xrcd;

pub use farlane_verbs_sys as sys;
pub use farlane_verbs_sys::qp_attr;
