//! Private servers, a proxy that can fail, child processes, and checks of who held a key when, for leasehold's tests,
//! benches and demo. Servers and sockets are real, and only servers that the testbed started are used.

mod builder;
pub mod child;
mod clock;
mod cluster;
mod connection;
mod error;
mod flow;
mod install;
mod keeper;
mod port;
mod process;
mod provide;
mod proxy;
mod relay;
mod reply;
mod sentinel;
mod server;
pub mod terms;
mod wait;

pub use builder::{ServerBuilder, TlsFiles};
pub use clock::OwnClock;
pub use cluster::{Cluster, ClusterBuilder};
pub use error::Error;
pub use process::Process;
pub use provide::{Install, find_server, provide_server};
pub use proxy::Proxy;
pub use reply::Reply;
pub use sentinel::{SentinelGroup, SentinelGroupBuilder};
pub use server::Server;
pub use wait::eventually;
