//! A vfio-user server.
