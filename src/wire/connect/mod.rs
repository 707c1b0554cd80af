//! Makes connections to a server: the address, the login, the checks before the first use, and the errors of all
//! these steps.

pub mod connection;
pub mod connector;
pub mod data_check;
pub mod epoch;
pub mod errors;
pub mod handshake;
pub mod refusal;
pub mod url;
