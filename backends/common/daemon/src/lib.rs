//! What every backend daemon shares, so that a backend's `main` only builds its device and serves
//! it:
//!
//! * [`options`]: the arguments that all of them take; [`keys`]: those of several keys;
//! * [`lifecycle`]: signals, quick and clean ends;
//! * [`listener`]: UNIX sockets that belong to one daemon; [`access`]: who may connect to them;
//! * [`vhost`] and [`vring`]: one VM after the other on a vhost-user socket;
//! * [`limb`]: threads that belong to a NUMA node; [`mailbox`]: how they hand each other work;
//!   [`locality`]: what was moved where;
//! * [`privileges`] and [`seccomp`]: what a running backend can no longer do;
//! * [`metrics`], [`logging`] and [`log_limit`]: what it tells, and how often.
//!
//! A daemon stays in the foreground. It starts in this order, so that each failure that its caller
//! can mend ends it with a message and a code other than zero before anybody can connect:
//! [`lifecycle::Lifecycle::begin`], arguments, sockets, [`privileges::give_up`], threads,
//! [`seccomp::confine`].

pub mod access;
pub mod keys;
pub mod lifecycle;
pub mod limb;
pub mod listener;
pub mod locality;
pub mod logging;
pub mod mailbox;
pub mod metrics;
pub mod options;
pub mod panics;
pub mod privileges;
pub mod seccomp;
pub mod vhost;
pub mod vring;

pub use farlane_sys::{eventfd, log_limit, log_limited, warn_limited};
