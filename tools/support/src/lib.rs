//! The parts that leasehold's own commands share: their start and stop, their servers, the programs that they run, and
//! the look of their output.

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
