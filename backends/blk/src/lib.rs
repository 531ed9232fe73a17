//! Disks of a virtual machine over vhost-user.

pub mod tunnel;
