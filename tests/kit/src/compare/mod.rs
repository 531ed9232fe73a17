//! Comparisons on a machine that is shared: every bench and every scenario that compares Farlane
//! with a reference uses these.
//!
//! [`compare`] has both sides measured in short interleaved rounds, takes the figure of each round
//! (a ratio of the two sides, or one side's figure alone), and judges the **median** of these
//! against a [`Bar`] with the median's confidence interval ([`interval`]). While the bar lies
//! inside of the interval, it asks for more rounds, up to [`Plan::most`]. A load that comes and
//! goes hits both sides of a round alike, and a few disturbed rounds do not move the median.
//!
//! Beside each result stand the [`Conditions`] of the machine in the same rounds: what a wake-up of
//! another core took, how much of its processors others had, and how much the hypervisor took away.

mod bars;
mod comparison;
pub mod cpu;
pub mod interval;
mod machine;

pub use bars::{Bars, Row};
pub use comparison::{
    Bar, Comparison, Plan, Round, Side, Verdict, alternating, compare, judge, observe,
};
pub use machine::{Conditions, Watch, wake_up};
