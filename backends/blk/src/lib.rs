//! Disks of a virtual machine over vhost-user.
