//! `farlane-topology`: shows what is on which NUMA node of a machine, and follows what backends
//! move where.
//!
//! * [`show`] and [`drawing`]: the machine, as text and as a drawing;
//! * [`metrics`]: the locality counters that a backend tells; [`series`]: their growth over time;
//! * [`live`]: that growth as lines in a terminal; [`figure`]: as a drawing (ioctopus-asplos20,
//!   figure 14); [`report`]: as JSON;
//! * [`run`](mod@run): what the program does, which `farlane topology` does, too;
//! * [`interrupt`]: pauses that a signal ends; [`svg`]: drawings.

pub mod drawing;
pub mod figure;
pub mod interrupt;
pub mod live;
pub mod metrics;
pub mod options;
pub mod report;
pub mod run;
pub mod series;
pub mod show;
pub mod svg;
