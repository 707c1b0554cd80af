//! One connection to a server or a sentinel: its address, its socket, the login, the checks before the first use, and
//! the errors of these steps. [`crate::wire::endpoint`] decides which server to connect to.

pub mod connection;
pub mod data_check;
pub mod dial;
pub mod epoch;
pub mod errors;
pub mod handshake;
pub mod refusal;
pub mod steps;
pub mod url;
