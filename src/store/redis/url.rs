//! Reads the URL of a Redis server.

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

/// Query parameters that redis-rs reads. redis-rs ignores all other parameters; this library refuses them.
const TCP_OPTIONS: &[&str] = &["protocol"];
const UNIX_OPTIONS: &[&str] = &["db", "user", "pass", "protocol"];

/// Reads the address and the login from `url`. The errors quote nothing of `url`: in a malformed URL, any part may
/// belong to the password.
pub(super) fn parse(url: &str) -> Result<ConnectionInfo, String> {
    const SHAPE: &str = "must be redis://user:password@host:port/database or unix:///path, with other characters \
        than letters, digits and -._~ percent-encoded in user and password";
    let parsed = redis::parse_redis_url(url).ok_or(SHAPE)?;
    let known = match parsed.scheme() {
        "rediss" | "valkeys" => return Err(NO_TLS.to_owned()),
        "redis" | "valkey" => TCP_OPTIONS,
        _ => UNIX_OPTIONS,
    };
    if parsed.fragment().is_some() {
        return Err(format!("has a part behind a #, but {SHAPE}"));
    }
    if parsed
        .query_pairs()
        .any(|(name, _)| !known.contains(&&*name))
    {
        return Err(format!(
            "has an unknown option; known are {}",
            known.join(", ")
        ));
    }
    let info = parsed
        .into_connection_info()
        .map_err(|error| match error.detail() {
            Some(_) => "has an unknown version in its option protocol".to_owned(),
            None => format!("{error}; it {SHAPE}"),
        })?;
    match info.addr() {
        // In `redis://user:password%40host`, the password is a part of the host, which errors show.
        ConnectionAddr::Tcp(host, _) if host.contains('%') => {
            Err(format!("has a % in the host, but {SHAPE}"))
        }
        _ => Ok(info),
    }
}

const NO_TLS: &str = "TLS is not supported by this build";

/// Returns the reason if this client cannot connect to an address. The reason quotes nothing of the address: redis-rs
/// may have taken a part of a password for the host.
pub(super) fn check_address(info: &ConnectionInfo) -> Result<(), &'static str> {
    match info.addr() {
        ConnectionAddr::Tcp(host, _) if host.is_empty() => Err("has no host"),
        ConnectionAddr::Tcp(host, _) if host.contains(['%', '@', '/']) => {
            Err("has a %, an @ or a / in the host")
        }
        ConnectionAddr::Tcp(..) => Ok(()),
        ConnectionAddr::Unix(_) if cfg!(unix) => Ok(()),
        ConnectionAddr::Unix(_) => Err("Unix sockets are not supported on this system"),
        ConnectionAddr::TcpTls { .. } => Err(NO_TLS),
        _ => Err("is of a kind that this version does not know"),
    }
}

/// The address without user and password, for debug output.
pub(crate) fn redacted_info(info: &ConnectionInfo) -> String {
    check_address(info).map_or_else(|_| "***".to_owned(), |()| address(info))
}

/// The URL without user, password and options, for debug output.
pub(crate) fn redacted(url: &str) -> String {
    parse(url).map_or_else(|_| "***".to_owned(), |info| address(&info))
}

/// The address for messages: `host:port`, or the path of a socket up to the first character that may begin a
/// misplaced option.
pub(crate) fn address(info: &ConnectionInfo) -> String {
    let addr = info.addr().to_string();
    if matches!(info.addr(), ConnectionAddr::Tcp(..)) {
        return addr;
    }
    match addr.split_once(['?', '&', ';', '=', '@', '%']) {
        Some((path, _)) => format!("{path}.."),
        None => addr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_parsed_as_by_redis_rs() {
        let info = parse("redis://user:pa%20ss@host:7000/3?protocol=resp2").unwrap();
        let settings = info.redis_settings();
        assert_eq!(settings.username(), Some("user"));
        assert_eq!(settings.password(), Some("pa ss"));
        assert_eq!(settings.db(), 3);
        assert!(parse("unix:///run/redis.sock?db=2&pass=x").is_ok());
        assert!(parse("valkey://host").is_ok());
    }
}
