//! `farlane`: one program for whoever runs backends.
//!
//! * [`options`]: the command line;
//! * [`find`]: where backends of this host tell their metrics; [`survey`]: asking all of them;
//! * [`backend`]: a backend as it tells them; [`latency`]: histograms of times;
//! * [`status`]: how they are now; [`top`]: what they do, again and again;
//! * [`doctor`]: what of this machine keeps backends, VMs or programs from working.
//!
//! `farlane topology` and `farlane lend` are [`farlane_topology::run()`](farlane_topology::run) and
//! [`farlane_lend::ask`].

pub mod backend;
pub mod doctor;
pub mod find;
pub mod latency;
pub mod options;
pub mod status;
pub mod survey;
pub mod top;
