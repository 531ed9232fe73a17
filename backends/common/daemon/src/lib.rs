//! What every backend daemon shares. A backend says what it opens, starts and ends
//! ([`run::Daemon`]), and its `main` is [`run::run`]:
//!
//! * [`run`]: a daemon from its command line to its end; [`control`]: its control loop;
//!   [`service_manager`]: whoever has started it;
//! * [`options`]: the arguments that all of them take; [`keys`]: those of several keys; [`config`]:
//!   files of them; [`reload`]: those that a running daemon follows anew;
//! * [`listener`]: UNIX sockets that belong to one daemon; [`access`]: who may connect to them;
//!   [`names`]: users and groups of the system;
//! * [`per_node`]: threads that belong to a NUMA node; [`locality`]: what was moved where;
//!   [`placement`]: where a VM's memory lies; [`periodic`]: work that is done again and again;
//! * [`privileges`] and [`seccomp`]: what a running backend can no longer do;
//! * [`metrics`], [`logging`] and [`log_limit`]: what it tells, and how often; [`terminal`]: tables
//!   of those who ask it.
//!
//! A daemon stays in the foreground.

pub mod access;
mod answering;
pub mod config;
pub mod control;
pub mod heap;
pub mod keys;
pub mod listener;
pub mod locality;
pub mod logging;
pub mod metrics;
pub mod names;
pub mod options;
pub mod panics;
pub mod per_node;
pub mod periodic;
pub mod placement;
pub mod privileges;
pub mod reload;
pub mod run;
pub mod seccomp;
pub mod service_manager;
mod stream;
pub mod terminal;

pub use farlane_sys::{eventfd, log_limit, log_limited, warn_limited};
