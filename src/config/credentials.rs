//! `Credentials`: a login, and the callback that returns one.

use std::error::Error as StdError;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::report::error::{Error, ErrorKind};

/// A password, with or without a user's name. The callback of
/// [`Builder::credentials`](crate::Builder::credentials) returns it, and
/// [`Builder::sentinel_credentials`](crate::Builder::sentinel_credentials) takes it. `Debug` shows neither.
///
/// ```
/// use leasehold::{Client, Credentials};
///
/// # let server = leasehold_testbed::Server::builder().password("t0ken").start().unwrap();
/// # let url = server.url().replace(":t0ken@", "");
/// # fn token() -> std::io::Result<String> { Ok("t0ken".to_owned()) }
/// let client = Client::builder(&url)
///     .credentials(|| Ok(Credentials::password(token()?)))
///     .build()?;
/// assert_eq!(client.with_lock("k", || 1)?, 1);
/// let named = Credentials::user("billing", "s3cret");
/// assert_eq!(format!("{named:?}"), "Credentials { .. }");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
pub struct Credentials {
    pub(crate) user: Option<String>,
    pub(crate) password: String,
}

/// The example of [`Credentials`] uses every function.
impl Credentials {
    /// The password of the default user.
    pub fn password(password: impl Into<String>) -> Self {
        Self {
            user: None,
            password: password.into(),
        }
    }

    /// A user's name and password.
    pub fn user(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self {
            user: Some(user.into()),
            password: password.into(),
        }
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

/// The result of a callback.
pub(crate) type CredentialsResult = Result<Credentials, Box<dyn StdError + Send + Sync>>;

/// The callback that returns the login of each connection.
#[derive(Clone)]
pub(crate) struct CredentialsCallback(Arc<dyn Fn() -> CredentialsResult + Send + Sync>);

impl CredentialsCallback {
    pub(crate) fn new(callback: impl Fn() -> CredentialsResult + Send + Sync + 'static) -> Self {
        Self(Arc::new(callback))
    }

    /// Calls the callback, for a connection to `address`. If the callback fails or panics, returns an error of the kind
    /// `Unavailable`: without a login, the client cannot connect now.
    pub(crate) fn call(&self, address: &str) -> Result<Credentials, Error> {
        let unavailable = |what: &str| {
            let message = format!("{address}: the callback of `Builder::credentials` has {what}");
            Error::new(ErrorKind::Unavailable, message)
        };
        // Only the text of the callback's error is kept: dropping the error runs user code, which must not happen under
        // a mutex of the library.
        let call = || (self.0)().map_err(|error| Failure::new(&*error));
        match catch_unwind(AssertUnwindSafe(call)) {
            Ok(Ok(credentials)) => Ok(credentials),
            Ok(Err(failure)) => {
                let what = "failed; check where it gets the login (the source of this error has the reason)";
                Err(unavailable(what).with_source(failure))
            }
            Err(_) => Err(unavailable("panicked; correct it")),
        }
    }
}

/// The text of a callback's error and of its causes.
#[derive(Debug)]
struct Failure(String);

impl Failure {
    fn new(error: &dyn StdError) -> Self {
        let (mut text, mut source) = (error.to_string(), error.source());
        while let Some(cause) = source {
            text += &format!(": {cause}");
            source = cause.source();
        }
        Self(text)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Failure {}
