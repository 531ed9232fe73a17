//! TLS between hosts: both ends have a certificate of an authority that the other trusts.

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::path::Path;
use std::sync::Arc;
use thiserror::Error;

/// Why TLS cannot be used.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read, or holds something else.
    #[error("Cannot read {what} from {path}")]
    File {
        /// Contents that were expected.
        what: &'static str,
        /// Path of the file.
        path: String,
        /// Why not.
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    /// No certificate of an authority is usable.
    #[error("{0} holds no usable certificate of an authority")]
    Authority(String),
    /// Certificate and key, or the set of algorithms, do not fit.
    #[error("The certificate cannot be used")]
    Certificate(#[from] rustls::Error),
    /// The authorities cannot be used to check peers.
    #[error("The authorities cannot be used")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    /// A host name that no certificate can have.
    #[error("{0:?} is not a name of a host")]
    Name(String),
}

/// Who this end is, and whom it believes.
#[derive(Clone, Debug)]
pub struct TlsIdentity {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl TlsIdentity {
    /// Reads PEM files: the certificate chain of this end, its private key, and the certificates
    /// of the authorities that peers' certificates must be signed by.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn load(certificate: &Path, key: &Path, authorities: &Path) -> Result<Self, TlsError> {
        let failed = |what, path: &Path| {
            let path = path.display().to_string();
            move |source| TlsError::File { what, path, source }
        };
        let certificates = |what, path: &Path| -> Result<Vec<CertificateDer<'static>>, TlsError> {
            CertificateDer::pem_file_iter(path)
                .and_then(Iterator::collect)
                .map_err(failed(what, path))
        };
        let chain = certificates("a certificate", certificate)?;
        let key = PrivateKeyDer::from_pem_file(key).map_err(failed("a private key", key))?;
        let mut roots = RootCertStore::empty();
        for root in certificates("authorities", authorities)? {
            roots.add(root)?;
        }
        if roots.is_empty() {
            return Err(TlsError::Authority(authorities.display().to_string()));
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(Arc::clone(&roots))
            .with_client_auth_cert(chain.clone(), key.clone_key())?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build()?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        Ok(Self {
            client: Arc::new(client),
            server: Arc::new(server),
        })
    }
}

/// The name under which a lender is looked for.
pub(crate) fn server_name(host: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Name(host.to_owned()))
}

/// Whether `certificate` is valid for the host `name`.
pub(crate) fn is_valid_for(certificate: &CertificateDer<'_>, name: &str) -> bool {
    let Ok(name) = ServerName::try_from(name) else {
        return false;
    };
    webpki::EndEntityCert::try_from(certificate)
        .is_ok_and(|end| end.verify_is_valid_for_subject_name(&name).is_ok())
}
