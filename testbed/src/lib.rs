//! Private servers and faults for leasehold's tests, benches and demo: real processes and real sockets; and a
//! protocol between a process and its children. Knows nothing of leasehold, and never touches a server that
//! it did not start.

mod builder;
pub mod child;
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
mod server;
mod wait;

pub use builder::{ServerBuilder, TlsFiles};
pub use cluster::{Cluster, ClusterBuilder};
pub use error::Error;
pub use process::Process;
pub use provide::{Install, find_server, provide_server};
pub use proxy::Proxy;
pub use reply::Reply;
pub use server::Server;
pub use wait::eventually;
