//! Errors as text that contains the next step.

use std::{fmt, io};

/// The reason why a server, a proxy or a command failed.
#[derive(Debug)]
pub struct Error {
    message: String,
    source: Option<io::Error>,
}

impl Error {
    pub(crate) fn new(message: impl Into<String>) -> Error {
        let message = message.into();
        Error {
            message,
            source: None,
        }
    }

    pub(crate) fn io(doing: impl Into<String>, source: io::Error) -> Error {
        Error {
            message: doing.into(),
            source: Some(source),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
