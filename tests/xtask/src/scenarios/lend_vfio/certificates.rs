//! Certificates of hosts, made for one run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

/// Somebody who says who is who.
pub struct Authority {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

/// The files of one host.
pub struct Identity {
    /// Its certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority whom it believes.
    pub authorities: PathBuf,
}

impl Authority {
    /// A new one, with its files in `folder`.
    pub fn new(folder: &Path) -> Result<Self> {
        fs::create_dir(folder).with_context(|| format!("Cannot make {}", folder.display()))?;
        let key = KeyPair::generate()?;
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = parameters.self_signed(&key)?;
        write(&folder.join("ca.pem"), &certificate.pem())?;
        Ok(Self {
            folder: folder.to_owned(),
            issuer: Issuer::new(parameters, key),
        })
    }

    /// Certifies that somebody is `name`: a host's name or address.
    pub fn identity(&self, name: &str) -> Result<Identity> {
        let key = KeyPair::generate()?;
        let parameters = CertificateParams::new(vec![name.to_owned()])?;
        let certificate = parameters.signed_by(&key, &self.issuer)?;
        let identity = Identity {
            certificate: self.folder.join(format!("{name}.pem")),
            key: self.folder.join(format!("{name}.key")),
            authorities: self.folder.join("ca.pem"),
        };
        write(&identity.certificate, &certificate.pem())?;
        write(&identity.key, &key.serialize_pem())?;
        Ok(identity)
    }
}

impl Identity {
    /// As words of a command line of the lender or the borrower.
    pub fn words(&self) -> [String; 6] {
        let word = |path: &Path| path.display().to_string();
        [
            "--tls-cert".into(),
            word(&self.certificate),
            "--tls-key".into(),
            word(&self.key),
            "--tls-ca".into(),
            word(&self.authorities),
        ]
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("Cannot write {}", path.display()))
}
