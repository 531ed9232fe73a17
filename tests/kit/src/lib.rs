//! The VM kit: makes what test guests need, boots them, works in them, and leaves nothing running.
//!
//! A scenario boots [`guest::Guest`]s from a [`qemu::VmConfig`], runs commands in them with
//! [`guest::Guest::run`] and [`guest::Guest::spawn`], starts daemons and host programs as
//! [`backend::Backend`] and [`process::Process`], and puts its figures into a [`report::Report`].
//! Everything is ended when its value is dropped, when the process is told to end, and when it
//! dies.

pub mod agent;
pub mod attachments;
pub mod backend;
pub mod checking_kernel;
pub mod compare;
pub mod contents;
pub mod cpio;
pub mod debian;
pub mod disk_boot;
pub mod driver;
pub mod guest;
pub mod guest_program;
pub mod guest_root;
pub mod held;
mod inbox;
pub mod interfaces;
mod job;
pub mod kernel;
pub mod kit;
pub mod loop_device;
pub mod modules;
pub mod network;
pub mod numa;
pub mod packages;
pub mod process;
pub mod progress;
pub mod protocol;
pub mod qemu;
pub mod qmp;
pub mod rdma_programs;
pub mod recorder;
pub mod report;
mod root_contents;
pub mod scratch;
pub mod tree;
#[cfg(target_arch = "x86_64")]
mod tsc;
mod vm_config;
pub mod wire;
pub mod workspace;
