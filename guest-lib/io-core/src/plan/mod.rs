//! Which way bytes take between a file and device memory (SPIN, section 4.3.1).
//!
//! A read into device memory can be served from the page cache or straight from the device (P2P).
//! A request of which a part is cached is cut into [`Run`]s; [`schedule()`] gives each its
//! [`Way`], by a [`CostModel`] that [`fit()`] makes from measured times. [`store`] keeps one model
//! a device, and [`trace`] is the line that says what was decided.
//!
//! Everything but [`store`] and [`device`] is a pure function.
//!
//! ```
//! use farlane_io_core::plan::{CostModel, Parameters, Run, Way, schedule};
//! // What SPIN found for an Intel P3700.
//! let model = CostModel::new(Parameters {
//!     cutoff_bytes: 512 << 10,
//!     p2p_overhead_ns: 584_000.0,
//!     p2p_bandwidth: 2.65e9,
//!     cache_overhead_ns: 0.0,
//!     cache_bandwidth: 10.13e9,
//!     readahead_bandwidth: None,
//! })?;
//! let runs = [Run::absent(1 << 20), Run::cached(4 << 10), Run::absent(1 << 20)];
//! assert_eq!(schedule(Some(&model), &runs), [Way::P2p, Way::P2p, Way::P2p]);
//! # Ok::<(), farlane_io_core::plan::ModelError>(())
//! ```

pub mod device;
mod fit;
mod greedy;
mod model;
pub mod oracle;
mod schedule;
pub mod store;
pub mod trace;

pub use fit::{Fit, FitError, Sample, fit};
pub use greedy::greedy;
pub use model::{CostModel, ModelError, Parameters, Run, Way};
pub use schedule::{Scheduler, schedule};
