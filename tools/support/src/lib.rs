//! What leasehold's own commands share: how they start and stop, which servers they use, which programs they run, and
//! the look of what they print. Knows nothing of what a command does.

pub mod cargo;
#[cfg(feature = "charts")]
pub mod chart;
#[cfg(feature = "environment")]
pub mod environment;
pub mod options;
pub mod progress;
pub mod stop;
pub mod table;

pub use stop::run;
